def urban_board(x): print(x + 8)
