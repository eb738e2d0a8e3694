"""When this process began to import jaxbuf. The package imports this module before any other of its own."""

import time

BEGAN = time.time()  # seconds, as the times of files
