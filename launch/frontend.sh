#!/usr/bin/env bash
# Starts the OpenAI-compatible frontend, which finds workers by discovery and routes requests by their caches.
# Machine: any; no GPU, about 0.3 GB of memory.
# Launch:  launch/frontend.sh [more arguments for dynamo.frontend]
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
join
exec "$PYTHON" -P -m dynamo.frontend --namespace "$NAMESPACE" --router-mode kv --http-host "$HTTP_HOST" --http-port "$HTTP_PORT" \
    --discovery-backend "$DYN_DISCOVERY_BACKEND" --request-plane "$DYN_REQUEST_PLANE" --event-plane "$DYN_EVENT_PLANE" "$@"
