def direct_field(z): return z + 20
