"""lm-eval task files and the code that puts their data in place (`python -m evals.fetch_data`)."""
