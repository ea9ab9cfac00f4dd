"""The commands that people run beside the workers; `common/cli.py` lists them."""
