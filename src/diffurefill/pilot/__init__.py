"""The pilot: a denoiser and its autoregressive twin write the same prompts, a judge reads both."""
