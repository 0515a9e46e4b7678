#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/config/load.h"
#include "core/data/token_source.h"

namespace moesaic::apps {

/// Ranks that compute different things would train one model to nobody's wish, without an error. These are collective: where a rank
/// differs from rank 0, all throw the same UsageError, which names the rank, its host and the difference.

/// The program, the configuration and --resume.
void require_same_start(Communicator& host,
                        const config::LoadedConfig& loaded,
                        const std::string& resume);
/// The data that `sources` show each rank, by data::fingerprint().
void require_same_data(Communicator& host, const std::vector<const data::TokenSource*>& sources);
/// `folder`, which rank 0 found, is there for every rank; `what` names the key that says where it lies.
void require_seen_by_all(Communicator& host,
                         const std::filesystem::path& folder,
                         const std::string& what);

/// `folder`, which rank 0 can write to, is one and the same for every rank, not one of this name on each machine.
void require_one_folder(Communicator& host, const std::filesystem::path& folder);

}  // namespace moesaic::apps
