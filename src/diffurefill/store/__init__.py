"""Where shared state lives; knows nothing of models or rounds."""
