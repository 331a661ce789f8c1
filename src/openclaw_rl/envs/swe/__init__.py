"""The environment `swe`: repositories with a bug, which is found and mended with tools, and checked by tests."""
