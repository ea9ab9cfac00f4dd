"""Shared by tests: engines, deployments, attackers and loads."""
