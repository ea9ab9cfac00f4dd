"""What one worker is told: command line, environment, YAML and policy files, checked before anything is built."""
