from diffurefill.cli import entry

entry()
