"""Where a request's time went: spans, recorded once, exported by OTLP, kept in a file, drawn by `trace`."""
