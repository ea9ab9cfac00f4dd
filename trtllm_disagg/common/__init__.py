"""Shared by all packages: commands, console, model directory; how processes start, report and end."""
