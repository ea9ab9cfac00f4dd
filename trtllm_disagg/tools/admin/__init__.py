"""The commands that change a running deployment: switch, set and scale."""
