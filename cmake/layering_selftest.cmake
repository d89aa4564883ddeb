# Plants violations one at a time and expects layering.cmake to find each.
#
#   cmake -D WORK=<scratch folder> -P layering_selftest.cmake

cmake_minimum_required(VERSION 3.25)

include(${CMAKE_CURRENT_LIST_DIR}/selftest.cmake)

macro(plant_include file include)
  plant(${file} "#pragma once\n\n  # include ${include} // planted\n")
endmacro()

function(expect_wrong file include text)
  plant_include(${file} "${include}")
  expect_refusal(layering "${file}: [^\n]*${text}")
endfunction()

function(expect_right file include)
  plant_include(${file} "${include}")
  expect_pass(layering)
endfunction()

# Arrows that point back or skip a layer.
expect_wrong(transport/a.cpp "\"actors/a.hpp\"" "must not include")
expect_wrong(transport/ucx/a.cpp "\"runtime/a.hpp\"" "must not include")
expect_wrong(partition/a.hpp "\"transport/fabric.hpp\"" "must not include")
expect_wrong(partition/a.hpp "\"transport/ucx/fabric.hpp\"" "must not include")
expect_wrong(partition/a.hpp "\"actors/a.hpp\"" "must not include")
expect_wrong(tp/a.hpp "\"actors/a.hpp\"" "must not include")
expect_wrong(tp/a.hpp "\"partition/a.hpp\"" "must not include")
expect_wrong(actors/a.hpp "\"runtime/a.hpp\"" "must not include")
expect_wrong(actors/a.hpp "<runtime/a.hpp>" "must not include")
expect_wrong(runtime/a.hpp "\"apps/a.hpp\"" "must not include")
expect_wrong(apps/smp-train/a.cpp "\"actors/a.hpp\"" "must not include")
expect_wrong(apps/smp-top/a.cpp "\"runtime/session/session.hpp\"" "must not include")
expect_wrong(apps/report/a.cpp "\"actors/stalls/a.hpp\"" "must not include")
expect_wrong(apps/report/a.cpp "<torch/torch.h>" "a Torch header")
expect_wrong(apps/report/a.cpp "<ncurses.h>" "a ncurses header")
expect_wrong(runtime/a.hpp "\"../transport/a.hpp\"" "not a path from")
expect_wrong(runtime/a.hpp "\"a.hpp\"" "not a path from")
expect_wrong(runtime/a.hpp "\"tests/support/a.hpp\"" "not a path from")

# Subfolders: back, out of the order, and to what users include.
expect_wrong(runtime/base/a.hpp "\"runtime/values/a.hpp\"" "points back")
expect_wrong(runtime/calls/a.cpp "<runtime/session/a.hpp>" "points back")
expect_wrong(runtime/intercept/script/a.cpp "\"runtime/session/a.hpp\"" "points back")
expect_wrong(runtime/calls/a.cpp "\"smp/smp.hpp\"" "must not include")
expect_wrong(include/smp/a.hpp "\"actors/host/node.hpp\"" "must not include")
expect_wrong(actors/protocol/a.hpp "\"actors/host/node.hpp\"" "points back")
expect_wrong(actors/server/a.hpp "\"actors/stalls/a.hpp\"" "points back")
expect_wrong(runtime/session/a.cpp "\"runtime/new/a.hpp\"" "a place unknown in")
expect_wrong(runtime/new/a.cpp "<string>" "a place unknown in")
expect_wrong(actors/a.cpp "<string>" "a place unknown in")
expect_wrong(actors/new/a.cpp "<string>" "a place unknown in")

# Actors that are none of the runtime's business.
expect_wrong(runtime/session/a.cpp "\"actors/server/module_server.hpp\"" "must not include")
expect_wrong(runtime/session/a.cpp "\"actors/protocol/actors.hpp\"" "must not include")

# Libraries out of their place.
expect_wrong(runtime/a.cpp "<caf/all.hpp>" "a CAF header")
expect_wrong(runtime/a.cpp "\"caf/all.hpp\"" "a CAF header")
expect_wrong(transport/a.hpp "<caf/fwd.hpp>" "a CAF header")
expect_wrong(apps/smp-top/a.cpp "<caf/all.hpp>" "a CAF header")
expect_wrong(transport/a.cpp "<ucp/api/ucp.h>" "a UCX header")
expect_wrong(runtime/a.cpp "<ucs/type/status.h>" "a UCX header")
expect_wrong(transport/a.hpp "<c10/core/Device.h>" "a Torch header")
expect_wrong(partition/a.cpp "<ATen/ATen.h>" "a Torch header")
expect_wrong(actors/a.cpp "<torch/torch.h>" "a Torch header")
expect_wrong(runtime/a.hpp "<torch/torch.h>" "too slow")

# What users include, at whatever distance.
function(plant_for_users include)
  plant(include/smp/smp.hpp "#include \"runtime/session/a.hpp\"\n"
    runtime/session/a.hpp "#include \"runtime/step/b.hpp\"\n"
    runtime/step/b.hpp "#include ${include}\n")
endfunction()
foreach(include "<torch/nn/module.h>" "<torch/script.h>" "<ATen/core/ivalue.h>")
  plant_for_users("${include}")
  expect_refusal(layering "runtime/step/b.hpp: too slow for what users include")
endforeach()
foreach(include "runtime/calls/messages.hpp" "runtime/optimizer/loss_scaler.hpp")
  plant_for_users("\"${include}\"")
  expect_refusal(layering "runtime/step/b.hpp: not for users")
endforeach()
plant_for_users("<ATen/core/Tensor.h>")
expect_pass(layering)

# What is allowed must pass, or the rules above prove nothing.
expect_right(transport/a.cpp "\"transport/a.hpp\"")
expect_right(transport/ucx/a.cpp "<ucp/api/ucp.h>")
expect_right(partition/a.hpp "\"transport/error.hpp\"")
expect_right(tp/a.hpp "\"transport/fabric.hpp\"")
expect_right(actors/schedule/a.hpp "<caf/all.hpp>")
expect_right(actors/schedule/a.hpp "\"partition/schedule/schedule.hpp\"")
expect_right(runtime/session/a.cpp "<torch/torch.h>")
expect_right(runtime/session/a.hpp "<ATen/core/Tensor.h>")
expect_right(runtime/session/a.hpp "\"actors/host/node.hpp\"")
expect_right(include/smp/a.hpp "\"runtime/session/a.hpp\"")
expect_right(apps/smp-train/a.cpp "\"smp/smp.hpp\"")
expect_right(runtime/session/a.hpp "\"runtime/intercept/script/a.hpp\"")
expect_right(runtime/calls/a.hpp "\"runtime/calls/b.hpp\"")
expect_right(actors/host/a.hpp "\"actors/protocol/a.hpp\"")
expect_right(apps/smp-top/a.cpp "\"actors/client.hpp\"")
expect_right(apps/smp-train/a.cpp "\"runtime/session/session.hpp\"")
expect_right(apps/smp-top/a.cpp "<ncurses.h>")
expect_right(actors/client.cpp "\"actors/stalls/a.hpp\"")

# What stands behind actors/client.hpp, at whatever distance.
plant(actors/client.hpp "#include \"actors/inspection/a.hpp\"\n"
  actors/inspection/a.hpp "#include <caf/fwd.hpp>\n")
expect_refusal(layering "actors/inspection/a.hpp: CAF behind actors/client")

# Cycles of units: of headers and sources alike, at whatever distance.
function(plant_cycle)
  set(files "")
  list(GET ARGN -1 last)
  foreach(unit IN LISTS ARGN)
    list(APPEND files ${last}.cpp "#include \"${last}.hpp\"\n #include <${unit}.hpp>\n"
      ${last}.hpp "#pragma once\n")
    set(last ${unit})
  endforeach()
  plant(${files})
endfunction()
foreach(letter a b c d e)
  list(APPEND units runtime/session/${letter})
endforeach()
plant_cycle(${units})
expect_refusal(layering "a cycle of 5 units [^\n]* runtime/session/a( [a-z/]*)*\n")
list(POP_BACK units)
plant_cycle(${units})
expect_pass(layering)
plant_cycle(transport/a transport/ucx/b)
expect_refusal(layering "a cycle across folders: transport/(a|ucx/b) transport/")
plant_cycle(runtime/intercept/a runtime/intercept/script/b)
expect_pass(layering)
# What lies side by side, or includes in one direction only, is not a cycle.
plant(tp/a.hpp "#include \"tp/b.hpp\"\n" tp/b.hpp "#include \"tp/c.hpp\"\n"
  tp/c.hpp "#include \"transport/d.hpp\"\n" tp/c.cpp "#include \"tp/c.hpp\"\n"
  transport/d.hpp "#include \"transport/e.hpp\"\n" transport/e.hpp "")
expect_pass(layering)

# Folders that are too large, in tests as well.
foreach(folder transport/ucx tests/support)
  set(files "")
  foreach(number RANGE 1 31)
    list(APPEND files ${folder}/a${number}.cpp "// planted\n")
  endforeach()
  plant(${files})
  expect_refusal(layering "${folder}: 31 files [^\n]*divide it")
endforeach()

file(REMOVE_RECURSE ${WORK})
