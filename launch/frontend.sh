#!/usr/bin/env bash
# The OpenAI-compatible frontend: finds the workers by discovery, routes requests to them by KV cache content.
# Machine:  any; no GPU, about 0.3 GB of memory. Ready in about one second, it then waits for workers.
# Launch:   launch/frontend.sh [more arguments for dynamo.frontend]
# Settings: launch/lib.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
exec "$PYTHON" -P -m dynamo.frontend --namespace "$NAMESPACE" --router-mode kv \
    --http-host "$HTTP_HOST" --http-port "$HTTP_PORT" --discovery-backend "$DYN_DISCOVERY_BACKEND" \
    --request-plane "$DYN_REQUEST_PLANE" --event-plane "$DYN_EVENT_PLANE" "$@"
