def wise_handler(z): return z - 11
