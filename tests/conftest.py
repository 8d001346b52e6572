"""Settings of every test."""

import os

# Tiny models gain nothing from threads, and threads that wait for each other on a busy machine lose a lot.
os.environ["OMP_NUM_THREADS"] = "1"
