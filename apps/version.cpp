#include "apps/version.h"

namespace moesaic::apps {

std::string version_text() {
  return "moesaic " MOESAIC_VERSION "\n"
         "git       " MOESAIC_GIT_ID "\n"
         "compiler  " MOESAIC_COMPILER "\n"
         "build     " MOESAIC_BUILD "\n"
         "CUDA      " MOESAIC_CUDA_BACKEND;
}

}  // namespace moesaic::apps
