"""What a person runs beside the workers. The command line finds each by the table in `cli`."""
