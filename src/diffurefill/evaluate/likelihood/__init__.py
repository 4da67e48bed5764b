"""How likely a text is under a masked-diffusion model: exact for a sampler, or bounded."""
