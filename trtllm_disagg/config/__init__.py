"""A worker's settings from command line, environment and YAML files, checked before anything is built."""
