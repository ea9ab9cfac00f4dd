"""Everything of Dynamo's runtime that a worker uses. No other package imports `dynamo`."""
