"""Pretrain a masked-diffusion language model on GPUs that vanish; write by draft and refill."""
