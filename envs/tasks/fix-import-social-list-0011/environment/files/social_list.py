def short_host(x): return x + 9
