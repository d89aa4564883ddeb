# Prints every file, function and line that is longer than it may be; see
# sizes.cmake. It counts braces and does not know C++: what stands before a
# brace, since the last statement, says whether a function begins.

function report(line, text) {
  printf "%s:%d: %s\n", name, line, text
  found = 1
}

# Drops what may hold a brace that does not count.
function strip(line) {
  if (raw != "") {
    if (!index(line, raw))
      return ""
    line = substr(line, index(line, raw) + length(raw))
    raw = ""
  }
  gsub(/\\./, "", line)
  gsub(/'.'/, "", line)
  while (match(line, /R"[a-z]*\(/)) {
    raw = ")" substr(line, RSTART + 2, RLENGTH - 3) "\""
    rest = substr(line, RSTART + RLENGTH)
    line = substr(line, 1, RSTART - 1)
    if (!index(rest, raw))
      return line
    line = line substr(rest, index(rest, raw) + length(raw))
    raw = ""
  }
  gsub(/"[^"]*"/, "", line)
  sub(/\/\/.*/, "", line)
  return line
}

# What follows "template <...>", which may hold others, and the word class.
function without_template(text,  i, open, char) {
  while (match(text, /^ *template *</)) {
    open = 1
    for (i = RLENGTH + 1; open && i <= length(text); ++i) {
      char = substr(text, i, 1)
      open += (char == "<") - (char == ">")
    }
    text = substr(text, i)
  }
  return text
}

function end_of_file() {
  if (lines > max_lines)
    report(lines, "a file of " lines " lines (at most " max_lines ")")
}

FNR == 1 {
  if (name)
    end_of_file()
  name = FILENAME
  depth = 0
  function_depth = 0
  value_depth = 0
  statement = ""
  raw = ""
  goes_on = 0
}

{
  lines = FNR
}

FILENAME !~ /\.[ch]pp$/ {
  next # a script: only its length counts
}

{
  width = $0
  gsub(/[\200-\277]/, "", width) # all but the first byte of a character
  if (length(width) > max_columns)
    report(FNR, "a line of " length(width) " columns (at most " max_columns ")")
  # Macros end without a semicolon.
  inside_macro = raw == "" && (goes_on || $0 ~ /^ *(#|CAF_)/)
  goes_on = inside_macro && $0 ~ /\\$/
  if (inside_macro)
    next
  line = strip($0)
  if (line ~ /[^ ]/ && statement !~ /[^ ]/)
    statement_line = FNR
  while (match(line, /[{};]/)) {
    char = substr(line, RSTART, 1)
    statement = statement " " substr(line, 1, RSTART - 1)
    line = substr(line, RSTART + 1)
    if (char == "{") {
      ++depth
      # A value, as "a_{1}" of a constructor: what it belongs to goes on. By the
      # form of the sources there is a blank before what a function does.
      if (!function_depth && !value_depth && statement ~ /\(.*[A-Za-z0-9_>]$/) {
        value_depth = depth
        value_of = statement
        value_line = statement_line
        statement = ""
        continue
      }
      if (value_depth)
        continue
      # A function: parameters, and neither a type nor an initializer.
      if (!function_depth && statement ~ /\(/ \
          && without_template(statement) !~ /^ *(namespace|class|struct|enum|union) / \
          && statement !~ /= *$/) {
        function_depth = depth
        function_line = statement_line
      }
    } else if (char == "}" && value_depth) {
      if (depth-- == value_depth) {
        value_depth = 0
        statement = value_of
        statement_line = value_line
      }
      continue
    } else if (char == "}") {
      if (depth == function_depth) {
        size = FNR - function_line + 1
        if (size > max_function)
          report(function_line, "a function of " size " lines (at most " max_function ")")
        function_depth = 0
      }
      --depth
    }
    statement = ""
    if (line ~ /[^ ]/)
      statement_line = FNR
  }
  statement = statement " " line
}

END {
  end_of_file()
  exit found
}
