"""One file per engine; see `base` for the contract."""
