#pragma once

// Everything a schedule of your own needs (docs/schedules.md).

#include "actors/schedule/schedule_actor.hpp"
