#pragma once

#include <string>
#include <vector>

#include "common/console.h"

namespace job {

/// Where a run writes to.
struct Output {
  std::string folder;  ///< empty: the next free folder below runs/
  bool resume = false, overwrite = false;
  bool no_plots = false;
  std::string python = JOB_PYTHON;  ///< one with matplotlib, that draws
  std::string progress = "auto";    ///< bar, lines or auto
};

/// Makes output.folder ready, losing nothing of an earlier run unasked: where it holds `checkpoint`
/// and neither `resume` nor `overwrite` is set, raises std::runtime_error that says so. Without
/// `resume` removes `leftovers`, names in the folder that an earlier run wrote. For rank 0.
void prepare_folder(Output& output, const std::string& checkpoint,
                    const std::vector<std::string>& leftovers);

/// Has the Python program `script` draw what it finds in the folder, and says which pictures it
/// made or why there are none and how to draw them by hand. A job without Python or matplotlib ends
/// well all the same.
void draw(const Output& output, const std::string& script, Console& console);

}  // namespace job
