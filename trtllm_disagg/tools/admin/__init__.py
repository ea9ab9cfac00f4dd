"""The commands that change a running deployment: switch, set, flip, scale, rollout and autoscale."""
