"""One module a mixer: its sizes, its parameters, its mathematics and its memory; see `jaxbuf.models.config.Mixer`."""
