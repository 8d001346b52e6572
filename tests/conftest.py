"""Settings of every test."""

import os

import pytest

# Tiny models gain nothing from threads, and threads that wait for each other on a busy machine lose a lot.
os.environ["OMP_NUM_THREADS"] = "1"

LONGEST = {
    *("test_real_model.py", "test_run.py", "test_distribution_flow.py", "test_serving_run.py"),
    *("test_action.py", "test_dashboard_pages.py"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes first: two workers share the files, and one alone with a long one would end last.

    `make test` keeps this order; by itself pytest-xdist begins with the files of most tests.
    """
    items.sort(key=lambda item: item.path.name not in LONGEST)
