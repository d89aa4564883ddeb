#pragma once

// Files of other programs call the tensors of a model as the class did that
// wrote them: without the name of the part that holds them in a larger model,
// or below the name of something that wrapped it.

#include <set>
#include <string>
#include <vector>

namespace smp {

struct tensor_outline;

/// Gives the tensors of a file the names of a model:
///
/// - Names that lack the first parts of the model's ("h.0.ln_1.weight" for
///   "transformer.h.0.ln_1.weight", as GPT2Model writes it) get them, if the
///   same parts complete all names that the model does not know, and no name
///   has them.
/// - Buffers that Hugging Face's code computes and earlier versions of it wrote
///   (masks, positions, frequencies) get none, unless the model has them.
///
/// @param known all names of the model's tensors
/// @param prefix with which names in the file begin, and the model's do not
/// @param path names the file in errors
/// @returns by tensor its name, which may still be unknown; empty: not to be
///          loaded
/// @throws error (config) if no name begins with `prefix`, or if without
///         another one all names would be known
std::vector<std::string> names_in_model(const std::vector<tensor_outline>& xs,
                                        const std::set<std::string>& known,
                                        const std::string& prefix,
                                        const std::string& path);

} // namespace smp
