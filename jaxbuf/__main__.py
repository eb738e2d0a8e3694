"""`python -m jaxbuf`."""

from jaxbuf.cli import app

app()
