WORD = "found inside the package"
