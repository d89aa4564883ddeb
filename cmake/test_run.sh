# shellcheck shell=bash
#
# How `./dev test` chooses tests and checks, runs them, and tells what came of
# it; `./dev` includes this.
#
# Proof tests run for minutes by design, and each header, benchmark and
# clang-tidy of a source takes seconds: a run takes a quarter of each, chosen by
# the commit, and all that changed lately. `--all` takes everything.

# -- what a run takes ----------------------------------------------------------

# Prints 0 to 3.
quarter() {
  local commit
  commit=$(git -C "$root" rev-parse HEAD 2>/dev/null) || commit=0
  echo $((16#${commit:0:4} % 4))
}

# Prints the files that differ from COMMIT, new ones too.
differs_from() {
  git -C "$root" diff --name-only --diff-filter=d "$1"
  git -C "$root" ls-files --others --exclude-standard
}

# Prints the commit to which "lately" goes back: the thirtieth before this, which
# is more than most changes have that come at once.
a_while_ago() { git -C "$root" rev-list --max-count=31 HEAD | tail -n 1; }

# of_this_run WHICH: prints those of the files on standard input that a run
# takes: all, what differs from the last commit, or a quarter and what changed
# lately.
of_this_run() {
  case $1 in
    all) cat ;;
    changed) grep -F -x -f <(differs_from HEAD) || true ;;
    *)
      { differs_from "$(a_while_ago)" && echo -- && cat; } |
        awk -v quarter="$(quarter)" '
          $0 == "--" { files = 1; next }
          !files { changed[$0] = 1; next }
          ++number % 4 == quarter || $0 in changed'
      ;;
  esac
}

# Prints the folders of tests/ whose tests look at the files on standard input;
# "." if one belongs to none of them, and nothing for pages, which the tests of
# the source tree read.
folders_of_tests() {
  local file folder
  while IFS= read -r file; do
    [[ $file != *.md && $file != docs/* ]] || continue
    folder=${file#tests/}
    while [[ $folder == */* ]]; do
      folder=${folder%/*}
      if compgen -G "$root/tests/$folder/*_test.cpp" >/dev/null; then
        echo "$folder"
        continue 2
      fi
    done
    echo .
  done | sort -u
}

# -- running them --------------------------------------------------------------

# The seconds that each test says it takes: what a run of all would take, and
# with that how far one is.
declare -A said
read_seconds() {
  local name seconds
  said=()
  [[ -f $build/tests/seconds.txt ]] || return 0
  while read -r name seconds; do
    said[$name]=$seconds
  done <"$build/tests/seconds.txt"
}

# Shows what ctest prints: of tests that fail everything, and how far it is; on
# a terminal in one line, else twice a minute.
show_tests() {
  local line name result failed=0 shown=$SECONDS begin=$SECONDS
  local -i done=0 total=$# over=0 rest=0 left at_once
  at_once=$(jobs)
  for name in "$@"; do rest+=${said[$name]:-1}; done
  while IFS= read -r line; do
    # What a test writes may look like this, too: a test of this script does.
    if [[ $line =~ ^\ *([0-9]+)/$total\ Test\ +#[0-9]+:\ ([^ ]+)\ \.*(.*)$ ]]; then
      done=${BASH_REMATCH[1]} name=${BASH_REMATCH[2]} result=${BASH_REMATCH[3]}
      over+=${said[$name]:-1}
      rest=$((rest - ${said[$name]:-1}))
      [[ $result != *Passed* && $result != *Skipped* ]] || line=
      [[ -z $line ]] || failed=$((failed + 1))
      # At the beginning only short tests are over: two minutes are assumed that
      # went as they should.
      left=$(((SECONDS - begin + 120) * (rest > 0 ? rest : 0) / (over + 120 * at_once)))
      if [[ -t 2 ]]; then
        printf '\r\e[K%d of %d tests, %d failed, about %d min left: %.40s' \
          "$done" "$total" "$failed" "$(((left + 59) / 60))" "$name" >&2
        [[ -z $line ]] || printf '\r\e[K' >&2
      elif ((SECONDS >= shown + 30)); then
        say "$done of $total tests, $failed failed, about $(((left + 59) / 60)) min left"
        shown=$SECONDS
      fi
      [[ -z $line ]] || printf '%s\n' "$line"
    elif ((done == total)) && [[ $line =~ ^[0-9]+%\ tests\ passed ]]; then
      break # ctest's summary; `report` has a better one
    elif [[ ! $line =~ ^\ +Start\ |^Test\ project\ |^$ ]]; then
      printf '%s\n' "$line"
    fi
  done
  cat >/dev/null
  [[ ! -t 2 ]] || printf '\r\e[K' >&2
}

# run_ctest NAME ARGUMENTS...: NAME.txt then has a line for each test that ran:
# what came of it, its seconds, its name; and NAME.skipped what it skipped.
run_ctest() {
  local results=$build/Testing/$1
  shift
  mkdir -p "$build/Testing"
  rm -f "$results.xml"
  local -a names
  mapfile -t names < <(cd "$build" && ctest -N "$@" | sed -n 's/^ *Test *#[0-9]*: //p')
  # Its exit status says less than its results do.
  (cd "$build" && ctest --output-on-failure --output-junit "$results.xml" "$@" 2>&1 || true) |
    show_tests "${names[@]}"
  [[ -f $results.xml ]] || die "ctest ran no test" "" "see its words above"
  # ctest says nothing of what was skipped in a file that passed.
  sed -n 's/^skipped: /dev: skipped: /p' "$build/Testing/Temporary/LastTest.log" >"$results.skipped"
  awk '
    function field(name, at) {
      at = index($0, " " name "=\"") + length(name) + 3
      return substr($0, at, index(substr($0, at), "\"") - 1)
    }
    function tell() { if (what != "") print what, seconds, test; what = "" }
    /^\t<testcase / {
      tell()
      what = field("status") == "run" ? "passed" : "failed"
      seconds = field("time")
      test = field("name")
    }
    /^\t\t<skipped message="SKIP_RETURN_CODE/ { what = "skipped" }
    END { tell() }' "$results.xml" >"$results.txt"
}

# those WHAT NAME: the tests of which that came.
those() { awk -v what="$1" '$1 == what { print $3 }' "$build/Testing/$2.txt"; }

# as_regex TEST...
as_regex() {
  local IFS='|'
  echo "^($*)$"
}

# Tests that fail beside others may do so by chance: each is run again by itself.
# If many do it was none, and what a sanitizer saw is an error however seldom.
# $build/Testing/again.txt has what came of it.
run_failed_again() {
  local -a failed
  mapfile -t failed < <(those failed first)
  : >"$build/Testing/again.txt"
  [[ $preset == release ]] || return 0
  ((${#failed[@]} > 0 && ${#failed[@]} <= 10)) || return 0
  say "running again what failed, one at a time: ${failed[*]}"
  run_ctest again -j 1 -R "$(as_regex "${failed[@]}")"
}

# How much of tests runs at a time, in processes of one thread: ranks wait for
# each other half of their time.
slots() { echo $((2 * $(jobs))); }

# The tests of what sees no Torch, and one training, under AddressSanitizer and
# UndefinedBehaviorSanitizer. All else is what was compiled for a release.
run_sanitized() (
  preset=asan-part build=$root/build/asan-part
  say "a part under sanitizers:"
  build_targets sanitized
  read_seconds
  run_ctest first -j "$(slots)" -R '^(transport|partition|actors)/|^training$'
)

# Prints the results of all that ran.
results() {
  cat "$build/Testing/first.txt"
  [[ -z $sanitized ]] ||
    sed 's, \([^ ]*\)$, asan:\1,' "$root/build/asan-part/Testing/first.txt"
}

# advise COMMAND WHICH TEST...: how to run just those.
advise() {
  local -a names
  mapfile -t names < <(printf '%s\n' "${@:3}" | grep -e "$2" | sed 's/^asan://' || true)
  ((${#names[@]} == 0)) || say "to run just them: ./dev $1 -R '$(as_regex "${names[@]}")'"
}

# Tells how long tests took, what was skipped, what failed by chance or again,
# and at last, in ctest's words, the sum. Its status is 1 if a test failed.
report() {
  local began=$1 total
  total=$(results | wc -l)
  local -a flaky failed
  mapfile -t flaky < <(those passed again)
  mapfile -t failed < <(results | awk '$1 == "failed" { print $3 }' | grep -F -x -v -f <(printf '%s\n' "${flaky[@]}") || true)
  if ((total > 10)); then
    say "the ten longest of $(results | awk '{ sum += $2 } END { printf "%d", sum }') s of tests:"
    results | sort -k 2 -n -r |
      awk 'NR <= 10 { printf "dev: %7.1f s  %s\n", $2, $3 }' >&2
  fi
  # Only while nothing else slows tests down does their time say something.
  awk 'NR == FNR { said[$1] = $2; next }
    $2 > 20 && $2 > 3 * said[$3] {
      printf "dev: %s took %d s and says seconds=%d in its first line\n", $3, $2, said[$3]
    }' "$build/tests/seconds.txt" "$build/Testing/first.txt" >&2
  cat "$build/Testing/first.skipped" >&2
  [[ -z $sanitized ]] || sed 's/^dev: skipped: /&asan:/' "$root/build/asan-part/Testing/first.skipped" >&2
  ((${#flaky[@]} == 0)) ||
    printf 'dev: flaky: %s failed beside others and passed alone\n' "${flaky[@]}" >&2
  if ((${#failed[@]})); then
    printf 'dev: failed: %s\n' "${failed[@]}" >&2
    advise test '^[^:]*$' "${failed[@]}"
    advise asan '^asan:' "${failed[@]}"
  fi
  printf '\n%d%% tests passed, %d tests failed out of %d\n\n' \
    $(((total - ${#failed[@]}) * 100 / (total > 0 ? total : 1))) "${#failed[@]}" "$total"
  printf 'Total Test time (real) = %6d sec\n' $((SECONDS - began))
  ((${#failed[@]} == 0))
}

# Whether a part ran under sanitizers.
sanitized=

# run_tests ARGUMENTS...: for ctest.
run_tests() {
  local began=$SECONDS
  read_seconds
  run_ctest first -j "$(slots)" "$@"
  run_failed_again
  report "$began"
}

# -- the command ---------------------------------------------------------------

# What is compiled for a run besides programs and tests.
extras_of_run() {
  git -C "$root" ls-files 'transport/*.hpp' 'partition/*.hpp' 'actors/*.hpp' \
    'tp/*.hpp' 'runtime/*.hpp' 'include/*.hpp' | of_this_run "$1" |
    sed 's,.*,header_check/&.passed,'
  git -C "$root" ls-files 'bench/*.cpp' | of_this_run "$1" |
    sed 's,^bench/\(.*\)[.]cpp$,bench_\1,'
}

# The form of all sources, and mistakes in those of a run. Of other folders each
# source includes Torch or CAF and takes as long as to compile; './dev lint'
# looks at those that change.
check_sources() {
  check_format
  local -a files
  mapfile -t files < <(git -C "$root" ls-files 'transport/*.cpp' 'partition/*.cpp' |
    of_this_run "$1")
  ((${#files[@]} == 0)) || check_mistakes "${files[@]}"
}

run_test() {
  local which=quarter
  case ${1:-} in
    --quick | --all | --changed)
      which=${1#--}
      shift
      ;;
  esac
  begin_python
  [[ $which == quick || $which == changed ]] || begin_next_transformers
  if (($#)) && [[ $which == quarter ]]; then # who names tests wants these
    build_targets all
    system_packages "${test_packages[@]}"
    run_tests "$@"
    return
  fi
  local -a targets=(all) choice=()
  case $which in
    quick) choice=(-LE proof) ;;
    changed)
      local -a folders
      mapfile -t folders < <(differs_from HEAD | folders_of_tests)
      choice=(-LE proof)
      if [[ " ${folders[*]} " != *" . "* ]]; then
        targets=(test_equipment)
        local folder pattern='(layering|docs|sizes)' # of the source tree
        for folder in "${folders[@]}"; do
          targets+=("${folder//\//_}_test")
          pattern+="|$folder/"
        done
        choice+=(-R "^($pattern)")
      fi
      say "of proof tests none, others of: ${folders[*]:-the source tree}"
      ;;
    quarter)
      choice=(-LE "proof-[$(tr -d "$(quarter)" <<<0123)]")
      say "of proof tests, and checks of headers, benchmarks and sources, quarter $(quarter) of 0 to 3, by the commit (--all takes all)"
      ;;
  esac
  if [[ $preset == release ]]; then
    mapfile -t -O "${#targets[@]}" targets < <(extras_of_run "$which")
  fi
  build_targets "${targets[@]}"
  system_packages "${test_packages[@]}"
  if [[ $preset == release ]]; then
    check_sources "$which"
    if [[ $which == all || ($which == quarter && $(quarter) == 3) ]]; then
      run_sanitized
      sanitized=1
    fi
  fi
  run_tests "${choice[@]}" "$@"
}
