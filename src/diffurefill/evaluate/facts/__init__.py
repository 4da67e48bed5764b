"""The fact probe: PopQA as plain sentences whose answer is hidden."""
