"""The engine core and its process."""
