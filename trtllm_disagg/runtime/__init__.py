"""Everything of Dynamo's runtime that a worker uses. Only this package and `publisher/` import `dynamo`."""

from trtllm_disagg.runtime.errors import from_dynamo, to_dynamo
from trtllm_disagg.runtime.handler import as_dynamo_handler
from trtllm_disagg.runtime.place import Runtime, ServedModel
from trtllm_disagg.runtime.stage import DynamoDirectory, DynamoStageInstance

__all__ = [
    "DynamoDirectory",
    "DynamoStageInstance",
    "Runtime",
    "ServedModel",
    "as_dynamo_handler",
    "from_dynamo",
    "to_dynamo",
]
