def great_buffer(z): return z - 11
