def young_project(z): return z * 13
