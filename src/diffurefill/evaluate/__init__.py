"""What is claimed is measured here."""
