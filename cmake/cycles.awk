# Prints every set of units that include each other, at whatever distance, where
# it has more units than `max_units` or lies in more than one folder; see
# layering.cmake. A unit is a header with its source.

function unit_of(file) {
  sub(/[.][ch]pp$/, "", file)
  return file
}

# The folder in the order of layering.cmake, with what lies below it.
function folder_of(unit,    parts) {
  return split(unit, parts, "/") > 2 ? parts[1] "/" parts[2] : parts[1]
}

FNR == 1 {
  unit = unit_of(FILENAME)
  known[unit]
}

/^[ \t]*#[ \t]*include[ \t]*["<][^">]*[.]hpp[">]/ {
  header = $0
  sub(/^[^"<]*["<]/, "", header)
  sub(/[">].*/, "", header)
  sub(/^smp\//, "include/smp/", header)
  if (unit_of(header) != unit)
    includes[unit] = includes[unit] unit_of(header) " "
}

# Sets seen[from, x] for all that `from` leads to.
function walk(from, at,    found, count, i) {
  count = split(includes[at], found, " ")
  for (i = 1; i <= count; ++i)
    if (found[i] in known && !((from, found[i]) in seen)) {
      seen[from, found[i]]
      walk(from, found[i])
    }
}

function report_cycle(first,    x, units, folders, count) {
  for (x in known)
    if ((first, x) in seen && (x, first) in seen) {
      done[x]
      ++count
      units = units " " x
      if (folder_of(x) != folder_of(first))
        folders = 1
    }
  if (folders)
    print "a cycle across folders:" units
  else if (count > max_units)
    print "a cycle of " count " units (at most " max_units "):" units
}

END {
  for (x in known)
    walk(x, x)
  for (x in known)
    if ((x, x) in seen && !(x in done))
      report_cycle(x)
}
