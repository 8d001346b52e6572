"""Set-up, benchmark and comparison scripts, run as `python -m scripts.NAME` from the repository root."""
