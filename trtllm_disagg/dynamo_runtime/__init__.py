"""All uses of Dynamo's runtime. No other package imports `dynamo`."""
