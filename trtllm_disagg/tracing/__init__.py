"""Records where a request's time went: spans, exported by OTLP, kept in a file, drawn by `trace`."""
