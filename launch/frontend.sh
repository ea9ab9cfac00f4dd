#!/usr/bin/env bash
# The OpenAI-compatible frontend: finds the workers by discovery, routes requests to them by KV cache content.
#
# Machine: any; no GPU, about 0.3 GB of memory. Ready in about one second, it then waits for workers.
# Launch:  launch/frontend.sh [more arguments for dynamo.frontend]
# Several machines: on all of them DYN_DISCOVERY_BACKEND=etcd ETCD_ENDPOINTS=http://HOST:2379; here HTTP_HOST=0.0.0.0.
#
# Knobs (environment):
#   HTTP_HOST      127.0.0.1   where clients reach it
#   HTTP_PORT      8000
#   NAMESPACE      dynamo      only workers of this Dynamo namespace are seen
#   DYN_FILE_KV    discovery directory, the same for all processes on one machine
#   PYTHON         python3
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

exec "$PYTHON" -P -m dynamo.frontend \
    --namespace "$NAMESPACE" \
    --router-mode kv \
    --http-host "$HTTP_HOST" \
    --http-port "$HTTP_PORT" \
    --discovery-backend "$DYN_DISCOVERY_BACKEND" \
    --request-plane "$DYN_REQUEST_PLANE" \
    --event-plane "$DYN_EVENT_PLANE" \
    "$@"
