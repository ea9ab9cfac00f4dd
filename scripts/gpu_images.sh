#!/bin/sh
# Checks on one GPU, with two models, that no answer is about another request's image; prints a block to paste.
# Downloads the models (8 and 15 GB). MODELS="..." for others; further flags go to scripts/gpu_images.py.
set -u
cd "$(dirname "$0")/.." || exit 1
status=0
for model in ${MODELS:-Qwen/Qwen2.5-VL-3B-Instruct llava-hf/llava-v1.6-mistral-7b-hf}; do
    python3 -m scripts.gpu_images --model "$model" --gpus 0 "$@" || status=1
done
exit $status
