"""`python -m jaxbuf.cli`."""

from jaxbuf.cli import app

app()
