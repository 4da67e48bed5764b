"""Where text lies, and reading it in ranges: this machine, the hub, buckets, HTTP."""
