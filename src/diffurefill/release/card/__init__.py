"""The model card: written from an exported folder and result files, and from nothing else."""
