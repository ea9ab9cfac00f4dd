"""Everything of Dynamo's runtime that a worker uses. Only this package and `publisher/` import `dynamo`."""

from trtllm_disagg.runtime.controller import Controller, controller
from trtllm_disagg.runtime.errors import from_dynamo, to_dynamo
from trtllm_disagg.runtime.handler import as_dynamo_handler, refuse_control
from trtllm_disagg.runtime.leaving import Leaving
from trtllm_disagg.runtime.place import Registration, Runtime, ServedModel
from trtllm_disagg.runtime.stage import DynamoDirectory, DynamoStageInstance

__all__ = [
    "Controller",
    "DynamoDirectory",
    "DynamoStageInstance",
    "Leaving",
    "Registration",
    "Runtime",
    "ServedModel",
    "as_dynamo_handler",
    "controller",
    "from_dynamo",
    "refuse_control",
    "to_dynamo",
]
