"""Everything of Dynamo's runtime that a worker uses. No other package imports `dynamo`."""

from trtllm_disagg.dynamo_runtime.advertised import Advertised
from trtllm_disagg.dynamo_runtime.discovery import (
    Controller,
    DynamoDirectory,
    DynamoStageInstance,
    controller,
)
from trtllm_disagg.dynamo_runtime.error_mapping import from_dynamo, to_dynamo
from trtllm_disagg.dynamo_runtime.handler import as_dynamo_handler, refuse_control
from trtllm_disagg.dynamo_runtime.shutdown import Leaving
from trtllm_disagg.dynamo_runtime.worker_endpoint import Registration, Runtime, ServedModel

__all__ = [
    "Advertised",
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
