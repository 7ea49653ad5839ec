"""Llama 2 and 3: dense, without biases."""

from megatron_awex.table import ATTENTION, FRAME, GROUPED_HEADS, MLP, MLP_SIZE, SIZES, Family

FAMILY = Family("llama", ("llama",), FRAME + ATTENTION + MLP, SIZES + GROUPED_HEADS + MLP_SIZE)
