#!/bin/bash
# Megatron-LM: GPT-3 of 6.7 billion parameters on two hosts of eight

MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --num-attention-heads 32
    --seq-length 2048
    --max-position-embeddings 2048
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 2
    --use-distributed-optimizer
)

torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${PARALLEL_ARGS[@]} \
    --micro-batch-size 8 --global-batch-size 512 \
    --bf16 --lr 1.2e-4 --train-iters 1000
